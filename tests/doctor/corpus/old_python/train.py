print 'amp', GradScaler()
