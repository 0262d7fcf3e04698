print 'amp', autocast()
